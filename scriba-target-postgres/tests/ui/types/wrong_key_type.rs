use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    status: String,
    total: Option<i64>,
}

fn main() {
    let _ = OrderRow::update(5_i64).set(OrderRow::STATUS, "shipped");
}
