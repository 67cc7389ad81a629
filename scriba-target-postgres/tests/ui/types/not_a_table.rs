use scriba_target_postgres::Table;

struct OrderRow;

fn needs<T: Table>() {}

fn main() {
    needs::<OrderRow>();
}
