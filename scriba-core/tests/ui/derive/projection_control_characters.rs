use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "or\nders\0")]
struct Orders;

fn main() {}
