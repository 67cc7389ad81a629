use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders", version = "2")]
struct Orders;

fn main() {}
