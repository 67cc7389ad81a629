use scriba_core::Projection;

#[derive(Projection)]
struct Orders;

fn main() {}
