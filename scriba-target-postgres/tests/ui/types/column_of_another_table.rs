use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    status: String,
    total: Option<i64>,
}

#[derive(Table)]
#[table(name = "lines")]
struct LineRow {
    #[table(key)]
    line_id: i64,
    status: String,
}

fn main() {
    let _ = OrderRow::update("o-1").set(LineRow::STATUS, "shipped");
}
