use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    #[event("order-placed", "OrderPlaced")]
    OrderPlaced,
}

fn main() {}
