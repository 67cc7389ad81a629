//! `#[derive(Events)]`.

use std::collections::HashMap;

use proc_macro2::TokenStream;
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Data, DeriveInput, Error, ExprPath, Fields, Ident, LitStr, Path, Result, Type, Variant};

use crate::at;
use crate::options::{BARE, Known, Options};

const ENUM_KNOWN: &[Known] = &[Known::once("crate", "crate = \"path\"")];

const VARIANT_KNOWN: &[Known] = &[
    Known::once(BARE, "\"event-type\""),
    Known { key: "alias", usage: "alias = \"other-type\"", repeatable: true },
    Known::once("upcast", "upcast = function"),
];

/// A variant as its options describe it.
struct Event<'a> {
    variant: &'a Ident,
    /// Its event type, then its aliases.
    types: Vec<LitStr>,
    body: Body<'a>,
}

enum Body<'a> {
    /// There is none to decode.
    Ignored,
    /// JSON of this type.
    Json(&'a Type),
    /// What this function makes of the event, of this type.
    Upcast(&'a Type, ExprPath),
}

pub(crate) fn derive(input: &DeriveInput) -> Result<TokenStream> {
    let krate = Options::parse(&input.attrs, "events", ENUM_KNOWN)?.krate("::scriba_core")?;
    let ident = &input.ident;
    let Data::Enum(data) = &input.data else {
        let problem = format!(
            "events are an enum with one variant per event type: write enum {ident} {{ OrderPlaced(OrderPlaced) }}"
        );
        return Err(Error::new(ident.span(), problem));
    };
    if !input.generics.params.is_empty() {
        let problem = "events have no generics, since they are decoded from bytes: name the types in the variants";
        return Err(Error::new(input.generics.span(), problem));
    }
    if data.variants.is_empty() {
        let problem = "an enum without variants takes no event: add a variant per event type, or use `RawEvent` for all events undecoded";
        return Err(Error::new(ident.span(), problem));
    }
    let events = data.variants.iter().map(Event::parse).collect::<Result<Vec<_>>>()?;
    check_types(&events)?;

    let types = events.iter().flat_map(|event| &event.types);
    let arms = events.iter().map(|event| event.arm(&krate));
    Ok(quote! {
        #[automatically_derived]
        impl #krate::Events for #ident {
            fn event_types() -> ::core::option::Option<&'static [&'static str]> {
                ::core::option::Option::Some(&[#(#types),*])
            }

            fn decode(event: &#krate::RecordedEvent) -> ::core::result::Result<Self, #krate::DecodeError> {
                match event.event_type.as_str() {
                    #(#arms)*
                    _ => ::core::result::Result::Err(#krate::DecodeError::unknown_type(&event.event_type)),
                }
            }
        }
    })
}

impl<'a> Event<'a> {
    fn parse(variant: &'a Variant) -> Result<Self> {
        let options = Options::parse(&variant.attrs, "event", VARIANT_KNOWN)?;
        let own = options.text(BARE)?.unwrap_or_else(|| LitStr::new(&variant.ident.to_string(), variant.ident.span()));
        let mut types = vec![own];
        types.extend(options.texts("alias")?);
        if let Some(empty) = types.iter().find(|literal| literal.value().is_empty()) {
            return Err(Error::new(empty.span(), "an event type is not empty: write the type as the source names it"));
        }
        let body = match &variant.fields {
            Fields::Unit => Body::Ignored,
            Fields::Unnamed(fields) if fields.unnamed.len() == 1 => Body::Json(&fields.unnamed[0].ty),
            fields => {
                let name = &variant.ident;
                let problem = format!(
                    "a variant has one field that holds the body: write {name}({name}), with a struct {name} of the fields"
                );
                return Err(Error::new(fields.span(), problem));
            }
        };
        let body = match (body, options.path("upcast")?) {
            (Body::Json(ty), Some(function)) => Body::Upcast(ty, function),
            (Body::Ignored, Some(function)) => {
                let name = &variant.ident;
                let problem = format!(
                    "a variant without a body has nothing to upcast: write {name}(Body), or leave `upcast` out"
                );
                return Err(Error::new(function.span(), problem));
            }
            (body, _) => body,
        };
        Ok(Self { variant: &variant.ident, types, body })
    }

    fn arm(&self, krate: &Path) -> TokenStream {
        let Self { variant, types, body } = self;
        let decoded = match body {
            Body::Ignored => quote!(::core::result::Result::Ok(Self::#variant)),
            Body::Json(ty) => {
                let read = quote_spanned!(at(ty.span())=> #krate::__private::serde_json::from_slice(&event.data));
                body_or_error(krate, variant, ty, &read)
            }
            Body::Upcast(ty, function) => {
                body_or_error(krate, variant, ty, &quote_spanned!(at(function.span())=> #function(event)))
            }
        };
        quote!(#(#types)|* => #decoded,)
    }
}

fn body_or_error(krate: &Path, variant: &Ident, ty: &Type, body: &TokenStream) -> TokenStream {
    quote! {{
        // The type stands here so that an error points to what the user wrote, not to the derive.
        let body: ::core::result::Result<#ty, _> = #body;
        match body {
            ::core::result::Result::Ok(body) => ::core::result::Result::Ok(Self::#variant(body)),
            ::core::result::Result::Err(error) => {
                ::core::result::Result::Err(#krate::DecodeError::new(&event.event_type, error))
            }
        }
    }}
}

fn check_types(events: &[Event<'_>]) -> Result<()> {
    let mut seen = HashMap::new();
    for event in events {
        for literal in &event.types {
            if let Some(other) = seen.insert(literal.value(), event.variant) {
                let problem = format!(
                    "event type {:?} is already one of `{other}`: each type is decoded into one variant",
                    literal.value()
                );
                return Err(Error::new(literal.span(), problem));
            }
        }
    }
    Ok(())
}
