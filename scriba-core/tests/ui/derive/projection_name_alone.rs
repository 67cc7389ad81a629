use scriba_core::Projection;

#[derive(Projection)]
#[projection("orders")]
struct Orders;

fn main() {}
