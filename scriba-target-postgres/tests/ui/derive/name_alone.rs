use scriba_target_postgres::Table;

#[derive(Table)]
#[table("orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
