use scriba_core::Events;

struct Body;

#[derive(Events)]
struct OrderEvent(Body);

fn main() {}
