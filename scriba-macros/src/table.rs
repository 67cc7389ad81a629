//! `#[derive(Table)]`.

use std::collections::HashSet;

use proc_macro2::TokenStream;
use quote::{format_ident, quote, quote_spanned};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{Data, DataStruct, DeriveInput, Error, Field, Fields, Ident, LitStr, Path, Result, Type};

use crate::at;
use crate::options::{Known, Options};

const STRUCT_KNOWN: &[Known] = &[
    Known::once("name", "name = \"orders\""),
    Known::once("schema", "schema = \"public\""),
    Known::once("crate", "crate = \"path\""),
];

const FIELD_KNOWN: &[Known] = &[
    Known::once("key", "key"),
    Known::once("column", "column = \"x\""),
    Known::once("cast", "cast = \"order_status\""),
];

/// Sets of columns are bits of a `u128`.
const COLUMNS: usize = 128;

/// Postgres cuts longer names off without an error.
const NAME_BYTES: usize = 63;

/// A field as its options describe it.
struct Column<'a> {
    field: &'a Ident,
    ty: &'a Type,
    name: LitStr,
    key: bool,
    cast: Option<LitStr>,
}

pub(crate) fn derive(input: &DeriveInput) -> Result<TokenStream> {
    let options = Options::parse(&input.attrs, "table", STRUCT_KNOWN)?;
    let row = &input.ident;
    let columns = columns(input)?;
    let name = options.text("name")?.ok_or_else(|| {
        Error::new(row.span(), "a table needs a name: write #[table(name = \"orders\")] on the struct")
    })?;
    check_name(&name)?;
    let schema = options.text("schema")?;
    schema.as_ref().map_or(Ok(()), check_name)?;
    if let Some((schema, table)) = name.value().split_once('.') {
        let problem = format!("the schema is an option of its own: write schema = {schema:?}, name = {table:?}");
        return Err(Error::new(name.span(), problem));
    }
    let krate = options.krate("::scriba_target_postgres")?;

    let constants = constants(input, &krate, &columns);
    let checks = columns.iter().map(|column| column.checks(&krate));
    let metas = columns.iter().map(|column| column.meta(&krate));
    let values = columns
        .iter()
        .map(|Column { field, ty, .. }| quote_spanned!(at(ty.span())=> #krate::PgValue::into_value(self.#field)));
    let schema = option(schema.as_ref());
    let key_indexes = columns.iter().enumerate().filter(|(_, column)| column.key).map(|(index, _)| index);
    let key_types: Vec<_> = columns.iter().filter(|column| column.key).map(|column| column.ty).collect();
    let (key, key_values) = if let [ty] = key_types[..] {
        (quote!(#ty), quote!(#krate::PgValue::into_value(key)))
    } else {
        let parts = (0..key_types.len()).map(syn::Index::from);
        (quote!((#(#key_types),*)), quote!(#(#krate::PgValue::into_value(key.#parts)),*))
    };
    Ok(quote! {
        #constants
        #(#checks)*

        #[automatically_derived]
        impl #krate::Table for #row {
            const META: &'static #krate::TableMeta = &#krate::TableMeta {
                schema: #schema,
                name: #name,
                columns: &[#(#metas),*],
                key: &[#(#key_indexes),*],
            };

            type Key = #key;

            fn into_values(self) -> ::std::boxed::Box<[#krate::Value]> {
                ::std::boxed::Box::new([#(#values),*])
            }

            fn key_values(key: Self::Key) -> ::std::boxed::Box<[#krate::Value]> {
                ::std::boxed::Box::new([#key_values])
            }
        }
    })
}

fn columns(input: &DeriveInput) -> Result<Vec<Column<'_>>> {
    let row = &input.ident;
    let Data::Struct(DataStruct { fields: Fields::Named(fields), .. }) = &input.data else {
        let problem =
            format!("a table is a struct with one named field per column: write struct {row} {{ order_id: String }}");
        return Err(Error::new(row.span(), problem));
    };
    if !input.generics.params.is_empty() {
        let problem = "a row has no generics, since its columns are those of one table: name the types of the fields";
        return Err(Error::new(input.generics.span(), problem));
    }
    if fields.named.len() > COLUMNS {
        let found = fields.named.len();
        let problem = format!(
            "{found} columns, at most {COLUMNS} are possible: leave out those that no event writes, or split the table"
        );
        return Err(Error::new(row.span(), problem));
    }
    let columns = fields.named.iter().map(Column::parse).collect::<Result<Vec<_>>>()?;
    if !columns.iter().any(|column| column.key) {
        let problem = "a table needs a key: write #[table(key)] on each field of its primary key";
        return Err(Error::new(row.span(), problem));
    }
    let mut names = HashSet::new();
    if let Some(second) = columns.iter().find(|column| !names.insert(column.name.value())) {
        let problem = format!("column {:?} is there already: each column is one field", second.name.value());
        return Err(Error::new(second.name.span(), problem));
    }
    Ok(columns)
}

/// `OrderRow::STATUS`, one for each column.
fn constants(input: &DeriveInput, krate: &Path, columns: &[Column<'_>]) -> TokenStream {
    let (row, visibility) = (&input.ident, &input.vis);
    let constants = columns.iter().enumerate().map(|(index, Column { field, ty, name, .. })| {
        let constant = format_ident!("{}", field.unraw().to_string().to_uppercase(), span = field.span());
        let doc = format!("The column `{}`.", name.value());
        quote! {
            #[doc = #doc]
            #visibility const #constant: #krate::Column<#row, #ty> = #krate::Column::at(#index);
        }
    });
    quote! {
        // A projection need not name every column it inserts.
        #[allow(dead_code)]
        #[automatically_derived]
        impl #row {
            #(#constants)*
        }
    }
}

impl<'a> Column<'a> {
    fn parse(field: &'a Field) -> Result<Self> {
        let options = Options::parse(&field.attrs, "table", FIELD_KNOWN)?;
        let ident = field.ident.as_ref().ok_or_else(|| Error::new(field.span(), "a column needs a named field"))?;
        let name = options.text("column")?.unwrap_or_else(|| LitStr::new(&ident.unraw().to_string(), ident.span()));
        check_name(&name)?;
        let cast = options.text("cast")?;
        cast.as_ref().map_or(Ok(()), check_cast)?;
        Ok(Self { field: ident, ty: &field.ty, name, key: options.flag("key")?.is_some(), cast })
    }

    fn meta(&self, krate: &Path) -> TokenStream {
        let Self { ty, name, .. } = self;
        let cast = self.cast.as_ref().map_or_else(|| quote!(<#ty as #krate::PgValue>::CAST), |cast| option(Some(cast)));
        quote_spanned! {ty.span()=>
            #krate::ColumnMeta { name: #name, kind: <#ty as #krate::PgValue>::KIND, cast: #cast }
        }
    }

    /// What only the type of the field can tell.
    fn checks(&self, krate: &Path) -> TokenStream {
        let ty = self.ty;
        let key = self.key.then(|| {
            quote_spanned! {ty.span()=>
                const _: () = ::core::assert!(
                    !<#ty as #krate::PgValue>::NULLABLE,
                    "a key is never NULL: write the type without `Option`",
                );
            }
        });
        let cast = self.cast.as_ref().map(|cast| {
            quote_spanned! {cast.span()=>
                const _: () = ::core::assert!(
                    ::core::matches!(<#ty as #krate::PgValue>::KIND, #krate::ValueKind::Text),
                    "`cast` is for values that travel as text: write the field as a `String`, or leave `cast` out",
                );
            }
        });
        quote!(#key #cast)
    }
}

fn option(literal: Option<&LitStr>) -> TokenStream {
    literal
        .map_or_else(|| quote!(::core::option::Option::None), |literal| quote!(::core::option::Option::Some(#literal)))
}

fn check_name(literal: &LitStr) -> Result<()> {
    let name = literal.value();
    let problem = if name.is_empty() {
        "a name is not empty: write it as the database spells it".to_owned()
    } else if name.len() > NAME_BYTES {
        format!("this name has {} bytes, Postgres keeps {NAME_BYTES}: write the one it kept", name.len())
    } else if name.contains('\0') {
        "a name in Postgres has no NUL in it: leave it out".to_owned()
    } else {
        return Ok(());
    };
    Err(Error::new(literal.span(), problem))
}

/// A cast becomes part of SQL text as it is, so it has to be the name of a type and nothing else. Modifiers are refused because
/// a cast to `varchar(5)` cuts off what an assignment would refuse.
fn check_cast(literal: &LitStr) -> Result<()> {
    let cast = literal.value();
    let (base, array) = cast.strip_suffix("[]").map_or((&*cast, ""), |base| (base, "[]"));
    if let Some((plain, _)) = base.split_once('(') {
        let problem =
            format!("the column has its own length and precision: write cast = \"{}{array}\"", plain.trim_end());
        return Err(Error::new(literal.span(), problem));
    }
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '.' | ' ' | '"');
    if base.trim().is_empty() || !base.chars().all(fits) {
        return Err(Error::new(literal.span(), "this is not the name of a type: write one like cast = \"numeric\""));
    }
    Ok(())
}
