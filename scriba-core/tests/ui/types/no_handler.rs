use scriba_core::{Handler, Projection, Target};

#[derive(Projection)]
#[projection(name = "orders")]
struct Orders;

fn needs<P: Projection + Handler, T: Target<P::Op>>() {}

struct NoTarget;

fn main() {
    needs::<Orders, NoTarget>();
}
