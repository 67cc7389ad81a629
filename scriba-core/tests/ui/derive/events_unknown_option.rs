use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    #[event(name = "order-placed")]
    OrderPlaced,
}

fn main() {}
