use scriba_target_postgres::Table;

#[derive(Table)]
#[table(table = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
