use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {
    OrderPlaced { order_id: String },
}

fn main() {}
