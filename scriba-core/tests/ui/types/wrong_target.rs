use scriba_core::{EventMeta, Handler, HandlerResult, Outcome, Projection, RawEvent, Target};

#[derive(Projection)]
#[projection(name = "orders")]
struct Orders;

struct OrderOp;

impl Handler for Orders {
    type Event = RawEvent;
    type Op = OrderOp;

    async fn handle(&self, _: RawEvent, _: &EventMeta) -> HandlerResult<OrderOp> {
        Ok(Outcome::skip())
    }
}

struct OtherTarget;

fn needs<P: Projection + Handler, T: Target<P::Op>>() {}

fn main() {
    needs::<Orders, OtherTarget>();
}
