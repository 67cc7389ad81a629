use scriba_core::Events;

struct Body;

#[derive(Events)]
union OrderEvent {
    number: u64,
}

fn main() {}
