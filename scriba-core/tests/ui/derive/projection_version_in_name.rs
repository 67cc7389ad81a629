use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders_v2")]
struct Orders;

fn main() {}
