use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: i64,
    status: String,
    total: Option<i64>,
}

fn main() {
    let _ = OrderRow::update("o-1").set(OrderRow::STATUS, "shipped");
}
