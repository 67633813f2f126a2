// Draws the sections, each when it comes into view.
document.getElementById("runs").append(...(runs.length > 1 ? runs.map((run, i) => element("label", {},
  element("input", { type: "checkbox", checked: true, onchange: (event) => {
    if (event.target.checked) shown.add(i); else shown.delete(i);
    for (const redraw of redraws) redraw();
  } }), swatch(colour(i)), run.name)) : []));
part("overview", drawOverview);
part("curves", drawCurves);
part("time", drawTime);
part("distributions", drawDistributions);
// The texts of samples come after this script in the file.
document.addEventListener("DOMContentLoaded", () => part("samples", drawSamples));
part("configuration", drawConfiguration);
// A jump needs everything above its target to have its height.
document.querySelector("nav").addEventListener("click", () => { for (const show of shows) show(); });
