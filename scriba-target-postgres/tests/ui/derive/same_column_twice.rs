use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    #[table(column = "order_id")]
    id: i64,
}

fn main() {}
