use scriba_core::{EventMeta, Handler, HandlerResult, Outcome, Projection, RawEvent};

struct Orders;

impl Handler for Orders {
    type Event = RawEvent;
    type Op = u8;

    async fn handle(&self, _: RawEvent, _: &EventMeta) -> HandlerResult<u8> {
        Ok(Outcome::skip())
    }
}

fn needs<P: Projection + Handler>() {}

fn main() {
    needs::<Orders>();
}
