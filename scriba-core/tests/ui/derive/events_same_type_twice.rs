use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    OrderPlaced,
    #[event("order-shipped", alias = "OrderPlaced")]
    OrderShipped,
}

fn main() {}
