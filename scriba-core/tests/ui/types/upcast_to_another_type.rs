use scriba_core::{Events, RecordedEvent};

struct OrderPlaced;

#[derive(Events)]
enum OrderEvent {
    #[event(upcast = from_old)]
    OrderPlaced(OrderPlaced),
}

fn from_old(_: &RecordedEvent) -> Result<String, String> {
    Ok(String::new())
}

fn main() {}
