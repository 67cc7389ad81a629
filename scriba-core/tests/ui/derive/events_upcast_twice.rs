use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    #[event(upcast = a, upcast = b)]
    OrderPlaced(Body),
}

fn main() {}
