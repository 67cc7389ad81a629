use scriba_target_postgres::Table;

#[derive(Table)]
#[table(name = "orders")]
enum OrderRow {
    Placed,
}

fn main() {}
