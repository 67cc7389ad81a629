use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders")]
#[projection(name = "orders")]
struct Orders;

fn main() {}
