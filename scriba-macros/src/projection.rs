//! `#[derive(Projection)]`.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{DeriveInput, Error, LitStr, Result, parse_quote};

use crate::options::{Known, Options};

const KNOWN: &[Known] = &[
    Known::once("name", "name = \"orders\""),
    Known::once("version", "version = 2"),
    Known::once("crate", "crate = \"path\""),
];

/// The checkpoint tables index the name, and an index entry has to fit a page.
const NAME_BYTES: usize = 200;

pub(crate) fn derive(input: &DeriveInput) -> Result<TokenStream> {
    let options = Options::parse(&input.attrs, "projection", KNOWN)?;
    let name = options.text("name")?.ok_or_else(|| {
        Error::new(input.ident.span(), "a projection needs a name: write #[projection(name = \"orders\")] on it")
    })?;
    check_name(&name)?;
    let version = match options.number("version")? {
        None => 1,
        Some(version) => match version.base10_parse::<u32>() {
            Ok(number) if number > 0 => number,
            _ => {
                let problem =
                    format!("versions run from 1 to {}: write version = 1, or leave it out, for the first", u32::MAX);
                return Err(Error::new(version.span(), problem));
            }
        },
    };
    let krate = options.krate("::scriba_core")?;
    let ident = &input.ident;
    let mut generics = input.generics.clone();
    if !generics.params.is_empty() {
        // What `Projection` asks of `Self` is not known of a parameter.
        generics
            .make_where_clause()
            .predicates
            .push(parse_quote!(Self: ::core::marker::Send + ::core::marker::Sync + 'static));
    }
    let (impl_generics, type_generics, where_clause) = generics.split_for_impl();
    Ok(quote! {
        #[automatically_derived]
        impl #impl_generics #krate::Projection for #ident #type_generics #where_clause {
            const NAME: &'static str = #name;
            const VERSION: u32 = #version;
        }
    })
}

fn check_name(literal: &LitStr) -> Result<()> {
    let name = literal.value();
    let problem = if name.trim().is_empty() {
        "a projection needs a name that is not empty: write name = \"orders\"".to_owned()
    } else if name.len() > NAME_BYTES {
        format!("this name has {} bytes, at most {NAME_BYTES} are allowed: write a shorter one", name.len())
    } else if name.chars().any(char::is_control) {
        format!("this name has control characters in it: write {:?}", name.replace(char::is_control, ""))
    } else if let Some((stem, version)) = split_version(&name) {
        format!("the version belongs in `version`: write name = {stem:?}, version = {version}")
    } else {
        return Ok(());
    };
    Err(Error::new(literal.span(), problem))
}

/// `orders_v2` is `orders` and `2`.
fn split_version(name: &str) -> Option<(&str, &str)> {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let digits = &name[stem.len()..];
    let stem = stem.strip_suffix("_v")?;
    (!digits.is_empty()).then_some((stem, digits))
}
