use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders", version = 0)]
struct Orders;

fn main() {}
