use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    OrderPlaced(Body, Body),
}

fn main() {}
