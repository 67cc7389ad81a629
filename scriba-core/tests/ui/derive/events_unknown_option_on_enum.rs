use scriba_core::Events;

struct Body;

#[derive(Events)]
#[events(rename_all = "kebab-case")]
enum OrderEvent {
    OrderPlaced,
}

fn main() {}
