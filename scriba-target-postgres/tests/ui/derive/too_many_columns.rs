use scriba_target_postgres::Table;

macro_rules! wide {
    ($($column:ident)*) => {
        #[derive(Table)]
        #[table(name = "wide")]
        struct Wide {
            #[table(key)]
            id: i64,
            $($column: i64,)*
        }
    };
}

wide!(
    c00 c01 c02 c03 c04 c05 c06 c07 c08 c09 c0a c0b c0c c0d c0e c0f
    c10 c11 c12 c13 c14 c15 c16 c17 c18 c19 c1a c1b c1c c1d c1e c1f
    c20 c21 c22 c23 c24 c25 c26 c27 c28 c29 c2a c2b c2c c2d c2e c2f
    c30 c31 c32 c33 c34 c35 c36 c37 c38 c39 c3a c3b c3c c3d c3e c3f
    c40 c41 c42 c43 c44 c45 c46 c47 c48 c49 c4a c4b c4c c4d c4e c4f
    c50 c51 c52 c53 c54 c55 c56 c57 c58 c59 c5a c5b c5c c5d c5e c5f
    c60 c61 c62 c63 c64 c65 c66 c67 c68 c69 c6a c6b c6c c6d c6e c6f
    c70 c71 c72 c73 c74 c75 c76 c77 c78 c79 c7a c7b c7c c7d c7e c7f
);

fn main() {}
