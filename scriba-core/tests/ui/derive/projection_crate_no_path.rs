use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders", crate = "not a path")]
struct Orders;

fn main() {}
