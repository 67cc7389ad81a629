use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders", version = 4294967296)]
struct Orders;

fn main() {}
