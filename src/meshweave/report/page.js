// The switch between the colours of the system, light and dark, on every page.
{
  const root = document.documentElement, button = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  const show = theme => {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = "colours: " + theme;
    root.dispatchEvent(new Event("themechange"));
  };
  let theme = "auto";
  try { theme = localStorage.getItem("meshweave-theme") ?? "auto"; } catch { /* a page without storage */ }
  button.onclick = () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    try { localStorage.setItem("meshweave-theme", theme); } catch { /* likewise */ }
    show(theme);
  };
  show(themes.includes(theme) ? theme : "auto");
}
