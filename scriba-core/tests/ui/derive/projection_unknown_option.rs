use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders", verison = 2)]
struct Orders;

fn main() {}
