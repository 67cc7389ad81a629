use scriba_core::Events;

struct OrderPlaced;

#[derive(Events)]
enum OrderEvent {
    OrderPlaced(OrderPlaced),
}

fn main() {}
