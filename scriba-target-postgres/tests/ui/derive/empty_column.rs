use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key, column = "")]
    order_id: String,
}

fn main() {}
