use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    #[event("")]
    OrderPlaced,
}

fn main() {}
