use scriba_core::Events;

struct Body;

#[derive(Events)]
enum OrderEvent {}

fn main() {}
