use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    #[event(upcast = from_old)]
    OrderPlaced,
}

fn main() {}
