use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    OrderPlaced(),
}

fn main() {}
