use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow {
    #[table(key)]
    order_id: String,
    #[table(cast = "varchar(5)[]")]
    tags: String,
}

fn main() {}
