use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
struct OrderRow<T> {
    #[table(key)]
    order_id: T,
}

fn main() {}
