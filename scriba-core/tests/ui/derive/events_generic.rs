use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent<T> {
    OrderPlaced(T),
}

fn main() {}
