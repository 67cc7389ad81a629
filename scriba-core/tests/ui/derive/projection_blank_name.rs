use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "  ")]
struct Orders;

fn main() {}
