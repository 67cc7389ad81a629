use scriba_core::Projection;

#[derive(Projection)]
#[projection(name = "ééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééééé")]
struct Orders;

fn main() {}
