// A page that was opened from a folder cannot load the index of the search.
if (location.protocol === "file:") {
  document.querySelectorAll("[data-md-component=search], [for=__search]").forEach((part) => part.remove());
  const note = document.createElement("span");
  note.textContent = "Search needs a server: mkdocs serve";
  document.querySelector(".md-header__inner").append(note);
}
