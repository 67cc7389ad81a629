use scriba_core::Projection;

#[derive(Projection)]
#[projection(version = 2)]
struct Orders;

fn main() {}
