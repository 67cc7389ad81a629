use scriba_target_postgres::Table;

#[derive(Table)]
struct OrderRow {
    #[table(key)]
    order_id: String,
}

fn main() {}
