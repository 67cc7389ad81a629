use scriba_core::{Handler, Projection};

#[derive(Projection)]
#[projection(name = "orders")]
struct Orders;

fn needs<P: Projection + Handler>() {}

fn main() {
    needs::<Orders>();
}
