use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key = true)]
    order_id: String,
}

fn main() {}
