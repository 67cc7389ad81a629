use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "orders")]
struct Orders(std::cell::Cell<u8>);

fn main() {}
