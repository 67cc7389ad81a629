use scriba_core::{EventMeta, Handler, HandlerResult, Outcome, Projection};

enum OrderEvent {
    OrderPlaced,
}

#[derive(Projection)]
#[projection(name = "orders")]
struct Orders;

impl Handler for Orders {
    type Event = OrderEvent;
    type Op = u8;

    async fn handle(&self, _: OrderEvent, _: &EventMeta) -> HandlerResult<u8> {
        Ok(Outcome::skip())
    }
}

fn main() {}
