use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent<'a> {
    OrderPlaced(&'a Body),
}

fn main() {}
