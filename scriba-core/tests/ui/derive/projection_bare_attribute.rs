use scriba_core::Projection;

#[derive(Projection)]
#[projection]
struct Orders;

fn main() {}
